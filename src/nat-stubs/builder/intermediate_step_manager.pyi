from insitu.workflow.steps import *
