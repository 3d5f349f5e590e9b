"""Estimates of a pretraining run before it starts, and a layout for it.

They have FLOPs, memory, communication and time.
"""
