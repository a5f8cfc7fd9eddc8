"""The tool of gsm8k-tools.toml."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, for example "(3 + 4) * 2.5"
    """
    return f"{value(ast.parse(expression, mode='eval').body):g}"


def value(node):
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(operand))
    raise ValueError("only numbers with + - * / and parentheses")
