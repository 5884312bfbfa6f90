"""One job: its config is resolved and checked, its folder made and locked, its ranks begun."""
