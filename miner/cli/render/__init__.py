"""How jobs, plans, offers and trainings look on a terminal. Imports rich: import it lazily."""
