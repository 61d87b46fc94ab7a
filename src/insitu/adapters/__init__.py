"""Trainer adapters: clients of the backends that train. In: groups with rewards or rows. Out: a finished job."""
