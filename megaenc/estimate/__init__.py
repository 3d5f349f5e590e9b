"""`megaenc estimate`: FLOPs, memory, communication and time of a pretraining run before it starts, and a layout for it."""
