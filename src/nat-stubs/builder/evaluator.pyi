from insitu.schemas.evaluation import *
