from insitu.schemas.steps import *
