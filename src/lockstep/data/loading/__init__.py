"""The loaders: how the examples of each step reach the device that trains on them."""

from lockstep.data.loading.loaders import Auto, Resident, Streaming
