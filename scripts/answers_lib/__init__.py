"""What ``scripts/answers`` does: asks systems the shipped questions, checks their answers, says how often and how steadily they are right."""
