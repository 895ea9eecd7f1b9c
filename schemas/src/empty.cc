// placeholder until the first source file lands
