"""What families are built of: rules, transforms, and what several families have in common."""
