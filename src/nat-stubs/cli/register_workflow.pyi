from insitu.integrations.nat.plugin_api import *
