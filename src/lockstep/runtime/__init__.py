"""The process and its machine: signals, the watchdog, threads, memory, how the program ends."""
