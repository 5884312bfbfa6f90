"""Random numbers of a forward pass (dropout, stochastic depth, noise), each by a key of its own example."""

from lockstep.stochastic.convert import ForwardDraws, KeyedModel, key_draws

__all__ = ["ForwardDraws", "KeyedModel", "key_draws"]
