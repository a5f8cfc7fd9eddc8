import re


def extract_answer(completion):
    found = re.findall("<answer>(.*?)</answer>", completion)
    return found[-1] if found else None
