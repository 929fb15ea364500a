"""What a user's own module may be: it raises when it is imported, and no ImportError."""

raise KeyError("a setting that is missing")
