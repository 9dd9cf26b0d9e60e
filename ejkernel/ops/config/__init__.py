"""Where parameters come from: the chain, the store and the tuner."""
