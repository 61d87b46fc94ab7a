from insitu.evaluation.evaluators import *
