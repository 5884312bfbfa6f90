"""One run on one rank: builds its parts, puts them together, trains and evaluates."""
