from insitu.plugin_api import *
