"""More outputs of each format than `make test` generates."""

import os

os.environ.setdefault("INSITU_FORMAT_OUTPUTS", "500")
