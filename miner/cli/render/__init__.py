"""Tables and pages on a terminal. Imports rich: import it lazily."""
