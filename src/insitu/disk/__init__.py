"""What survives a power failure: files, locks, checkpoints and models on disk.

In: records and tensors. Out: files that are complete or absent at any time. Read `files` first, then `json_files`.
"""
