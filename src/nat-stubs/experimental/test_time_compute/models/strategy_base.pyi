from insitu.workflow.ttc import *
