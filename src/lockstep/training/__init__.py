"""One run on one rank: its parts are made, put together, trained and evaluated."""
