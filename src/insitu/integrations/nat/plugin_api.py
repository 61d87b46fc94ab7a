"""What a plugin imports from the documented `nat.plugin_api`: our plugin API, and the names of the other paths."""

from insitu.config import Config as Config
from insitu.integrations.nat.ttc import *  # noqa: F403
from insitu.plugin_api import *  # noqa: F403
from insitu.plugin_api import __getattr__ as __getattr__
