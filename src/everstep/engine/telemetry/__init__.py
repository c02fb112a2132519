"""What a worker shows of itself: beacon, recorder, op times; and the faults that tests plant in it."""
