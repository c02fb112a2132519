"""What models are made of: the split backward of a Linear, attention, and what is split among shards."""
