"""Everything that insitu plugs into: each folder is a leaf that can be deleted, and the core trains without it.

The core finds them by entry points (`pyproject.toml`) and never imports them. An integration may import all of the
core; those with a half that runs in the backend's process (`art/server`, `torchrun`, `vllm`) import `backend` there.
"""
