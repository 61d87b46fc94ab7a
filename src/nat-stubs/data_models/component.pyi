from insitu.schemas.components import *
