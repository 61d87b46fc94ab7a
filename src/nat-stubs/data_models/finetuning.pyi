from insitu.schemas.finetuning import *
