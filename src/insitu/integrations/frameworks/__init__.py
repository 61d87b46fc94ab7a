"""Agent frameworks: one module each, with `make_llm(llm)`, which returns the framework's model object.

In: our model object. Out: theirs, whose calls are recorded. `insitu.agents.frameworks` has what they share; read
`openai` first.
"""
