"""Refuse native Windows in one sentence, before a module is imported that needs POSIX."""

import sys

if sys.platform == "win32":
    UNSUPPORTED = ImportError("Lockstep does not run on native Windows; run it in WSL2 (wsl --install)")
    before = sys.excepthook

    def show_unsupported(kind, error, traceback):  # type: ignore[no-untyped-def]
        """End a command that has not caught the error like any other mistake of its user."""
        if error is not UNSUPPORTED:
            return before(kind, error, traceback)
        sys.stderr.write(f"lockstep: {error}\n")
        sys.exit(2)

    sys.excepthook = show_unsupported
    raise UNSUPPORTED  # another program catches it: Hydra looks for the plugins of everything that is installed
