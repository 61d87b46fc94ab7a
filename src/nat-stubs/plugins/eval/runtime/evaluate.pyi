from insitu.collect.evaluation import *
