"""The command `lockstep`. Its functions raise InputError for mistakes of the user, StorageError for full disks.

`runtime.program.command_line` shows the sentence of an error, and exits with its code.
"""
