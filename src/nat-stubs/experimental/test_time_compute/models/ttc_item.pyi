from insitu.schemas.ttc import *
