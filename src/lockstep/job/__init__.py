"""One job: its config is resolved and checked, its folder is created and locked, its ranks are started."""
