from insitu.evaluation.run import *
