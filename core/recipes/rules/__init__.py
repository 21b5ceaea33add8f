"""What an engine accepts without a word and then ignores, or dies of after the model is loaded.

One module per engine. A rule looks at keys that are each right by themselves; keys and types are
`core.recipes.schema`'s business.
"""
