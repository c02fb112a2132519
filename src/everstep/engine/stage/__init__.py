"""What one worker computes of a microbatch: forward, input gradient, weight gradient, loss, evaluation."""
