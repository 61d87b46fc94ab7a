"""Plain Python functions as agents and scores, and scores for common cases; nothing has to be registered.

functions    `_type: python` of `workflow` and `functions`, and how parameters are filled by their names
scores       `_type: python` of `eval.evaluators`
comparisons  `exact_match`, `contains`, `regex`, `json_fields`, `numeric`
judgements   `llm_judge`, `weighted_sum`
"""
