from insitu.workflow.context import *
