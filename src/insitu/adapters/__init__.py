"""Trainer adapters: clients of the backends that train."""
