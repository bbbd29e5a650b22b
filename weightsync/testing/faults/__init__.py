"""Workers and trainers in processes of their own, and all that can go wrong between them."""
