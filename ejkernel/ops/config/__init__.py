"""What surrounds a call (``target``, ``overlay``, tuning), and where its parameters come from: chain, store, tuner."""
