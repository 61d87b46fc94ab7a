"""What survives a power failure: files, locks, checkpoints and models on disk; and temporary folders, which do not.

In: records and tensors. Out: files that are complete or absent at any time. Read `files` first, then `json_files`.
"""
