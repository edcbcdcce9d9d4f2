"""Is everything as training needs it? What each host, and all ranks together, find out.

Finding is apart from telling: `Diagnosis` is a value, `screen` and `document` print it.
"""
