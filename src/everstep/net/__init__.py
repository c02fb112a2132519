"""How tensors get from one worker to another: links, transports, arenas, states on their way to joiners."""
