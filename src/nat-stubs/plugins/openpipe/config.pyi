from insitu.integrations.art.config import *
