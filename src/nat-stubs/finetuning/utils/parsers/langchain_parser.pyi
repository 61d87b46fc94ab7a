from insitu.integrations.nat.langchain_parser import *
