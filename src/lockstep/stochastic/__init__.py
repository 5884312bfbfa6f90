"""Random numbers of a forward pass (dropout, stochastic depth, noise), derived from a key of each example."""

from lockstep.stochastic.convert import ForwardDraws, KeyedModel, key_draws
