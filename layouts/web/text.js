/*
 * The playground's language, the counterpart of layouts/syntax.py and layouts/text.py: same trees, steps and errors.
 * `divide(S<3,3,3> o (8,64):(64,1), (8,8))`, `TV ((4,8),(2,2)):((32,1),(16,8)) on (16,8)`.
 */
(() => {
  "use strict";

  const A = CF.algebra;
  const MAX_SHOWN = 2 ** 20; // elements of any layout that appears while a text is evaluated
  const MAX_INTEGER = 2 ** 31; // integers in a text, and the reach (cosize) of any layout that appears
  const MAX_TEXT = 4096; // characters
  const MAX_DEPTH = 32; // parentheses and calls inside each other

  const MESSAGES = {
    congruent: "stride {stride} is not nested like shape {shape}",
    size: "{layout} has more than {limit} elements",
    reach: "{layout} reaches beyond offset {limit}",
    expected: "expected {expected}, found {found}",
    too_long: "the text is longer than {limit} characters",
    too_deep: "parentheses and calls are nested deeper than {limit}",
    too_large: "integer {found} is larger than {limit}",
    function: "unknown function {name}; known are {known}",
    needs_layout: "{function} needs a layout here, given {given}",
    needs_integer: "{function} needs an integer here, given {given}",
    needs_plain: "{function} needs a layout without a swizzle here, given {given}",
    tiler_alone: "a tuple of layouts is a tiler: it is understood only as the second argument of a function",
    tv_rank: "a TV layout needs two modes (thread, value), given {layout}",
    tv_shape: "a TV layout needs a shape of two extents, given {shape}",
    tv_reach: "{layout} reaches element {reach}, but shape {shape} has {size}",
  };
  const words = (key, values = {}) => A.fill(MESSAGES[key], values);

  /** Layout text without a value: `length` characters from `position` are at fault (0 at the end of the text). */
  class LayoutTextError extends Error {
    constructor(text, position, length, message) {
      super(message);
      Object.assign(this, { text, position, length });
    }
  }

  /** Text outside the grammar; `expected` says what is allowed at `position`. */
  class LayoutSyntaxError extends LayoutTextError {
    constructor(text, position, length, message, expected) {
      super(text, position, length, message);
      this.expected = expected;
    }
  }

  /* What functions take: a layout, one without a swizzle, a tiler, an integer. `optional` last ones may be missing. */
  const [LAYOUT, PLAIN, TILER, INTEGER] = ["layout", "plain", "tiler", "integer"];
  const takes = (run, kinds, { optional = 0, traced = false } = {}) => ({ run, kinds, optional, traced });
  const tiling = (run, ...kinds) => takes(run, kinds, { traced: true });
  const FUNCTIONS = {
    compose: takes(A.composition, [LAYOUT, TILER]),
    complement: takes((a, target) => A.complement(a, target), [PLAIN, INTEGER], { optional: 1 }),
    divide: tiling(A.logicalDivide, LAYOUT, TILER),
    zipped_divide: tiling(A.zippedDivide, LAYOUT, TILER),
    tiled_divide: tiling(A.tiledDivide, LAYOUT, TILER),
    flat_divide: tiling(A.flatDivide, LAYOUT, TILER),
    product: tiling(A.logicalProduct, PLAIN, TILER),
    zipped_product: tiling(A.zippedProduct, PLAIN, TILER),
    tiled_product: tiling(A.tiledProduct, PLAIN, TILER),
    flat_product: tiling(A.flatProduct, PLAIN, TILER),
    blocked_product: tiling(A.blockedProduct, PLAIN, PLAIN),
    raked_product: tiling(A.rakedProduct, PLAIN, PLAIN),
    right_inverse: takes(A.rightInverse, [PLAIN]),
    left_inverse: takes(A.leftInverse, [PLAIN]),
    coalesce: takes(A.coalesce, [LAYOUT]),
    flatten: takes(A.flat, [LAYOUT]),
    filter: takes(A.filter, [PLAIN]),
  };
  const ALIASES = { composition: "compose", logical_divide: "divide", logical_product: "product" }; // CuTe's names

  const TOKEN = /[ \t\r\n]*(?:(?<integer>_?[0-9]+)|(?<name>[A-Za-z][A-Za-z0-9_]*)|(?<other>[^ \t\r\n]))/gu;
  const OPERAND = "an integer or '('";

  function tokens(text) {
    const found = [];
    for (const match of text.matchAll(TOKEN)) {
      const { integer, name, other } = match.groups;
      const word = integer ?? name ?? other;
      const start = match.index + match[0].length - word.length;
      found.push({ kind: integer ? "integer" : name ? "name" : other, start, end: start + word.length, text: word });
    }
    found.push({ kind: "end", start: text.length, end: text.length, text: "" });
    return found;
  }

  /* A piece of the text for messages, cut to 40 characters. */
  const quoted = (source) => (source.length <= 40 ? `'${source}'` : `'${source.slice(0, 37)}...'`);

  /* True if an item is a layout or a nest that holds one, which can only be a tiler. */
  const hasLayouts = (item) => item.type === "layout" || (item.type === "nest" && item.items.some(hasLayouts));

  /* Recursive descent, one method a rule, one token of lookahead (two after the `o` of a swizzle). */
  class Parser {
    constructor(text) {
      this.text = text;
      const characters = [...text].length;
      if (characters > MAX_TEXT) {
        const message = words("too_long", { limit: MAX_TEXT });
        throw new LayoutSyntaxError(text, MAX_TEXT, characters - MAX_TEXT, message, "the end of the text");
      }
      this.tokens = tokens(text);
      this.at = 0;
      this.depth = 0;
    }

    get token() {
      return this.tokens[this.at];
    }

    input() {
      const isTV = this.token.kind === "name" && this.token.text === "TV";
      const node = isTV ? this.threadValue() : this.expression();
      if (this.token.kind !== "end") {
        const endsInShape = ["number", "nest"].includes(node.type) && !hasLayouts(node);
        throw this.unexpected(endsInShape ? "':' or the end of the text" : "the end of the text");
      }
      return node;
    }

    threadValue() {
      const { start } = this.take("name", "'TV'");
      const layout = this.layout();
      this.word("on");
      const shape = this.item(OPERAND, 1);
      return { type: "tv", start, end: shape.end, layout, shape };
    }

    expression() {
      const { kind, text } = this.token;
      if (kind === "name") return text === "S" || text === "Sw" ? this.composed() : this.call();
      if (kind === "integer" || kind === "(") return this.layout(true);
      throw this.unexpected("a layout or a function");
    }

    call() {
      const token = this.take("name", "a function");
      const name = Object.hasOwn(ALIASES, token.text) ? ALIASES[token.text] : token.text;
      if (!Object.hasOwn(FUNCTIONS, name)) {
        const message = words("function", { name: quoted(token.text), known: Object.keys(FUNCTIONS).join(", ") });
        throw new LayoutSyntaxError(this.text, token.start, token.text.length, message, "a function");
      }
      const { kinds, optional } = FUNCTIONS[name];
      this.open();
      const items = [this.expression()];
      while (items.length < kinds.length) {
        if (items.length >= kinds.length - optional && this.token.kind !== ",") break;
        this.take(",", "','");
        items.push(this.expression());
      }
      const end = this.close(items.length < kinds.length ? "',' or ')'" : "')'");
      return { type: "call", start: token.start, end, name, arguments: items };
    }

    composed() {
      const swizzle = this.swizzle();
      this.word("o");
      let offset = 0;
      if (this.token.kind === "integer" && this.tokens[this.at + 1].text === "o") {
        offset = this.number(OPERAND).value;
        this.word("o");
      }
      const layout = this.layout();
      return { type: "composed", start: swizzle.start, end: layout.end, swizzle, offset, layout };
    }

    swizzle() {
      const { start } = this.take("name", "'S'");
      this.take("<", "'<'");
      const bits = this.number("an integer").value;
      this.take(",", "','");
      const base = this.number("an integer").value;
      this.take(",", "','");
      const sign = this.token.kind === "-" ? -1 : 1;
      if (sign < 0) this.at++;
      const shift = sign * this.number("an integer").value;
      return { start, end: this.take(">", "'>'").end, bits, base, shift };
    }

    /* A shape with or without a stride; with `tilers` also a list that holds layouts. */
    layout(tilers = false) {
      const shape = this.item(OPERAND, 1, tilers);
      return this.token.kind === ":" && !hasLayouts(shape) ? this.strided(shape) : shape;
    }

    strided(shape) {
      this.take(":", "':'");
      const stride = this.item(OPERAND, 0);
      return { type: "layout", start: shape.start, end: stride.end, shape, stride };
    }

    /* An integer of at least `least`, or a list of items; with `tilers` those in the list may have strides. */
    item(expected, least, tilers = false) {
      if (this.token.kind === "integer") return this.number(expected, least);
      if (this.token.kind !== "(") throw this.unexpected(expected);
      const start = this.open();
      const items = [];
      while (items.length === 0 || this.token.kind === ",") {
        if (items.length > 0) this.at++;
        const item = this.item(OPERAND, least, tilers);
        items.push(tilers && this.token.kind === ":" && !hasLayouts(item) ? this.strided(item) : item);
      }
      return { type: "nest", start, end: this.close("',' or ')'"), items };
    }

    number(expected, least = 0) {
      const token = this.take("integer", expected);
      const value = Number(token.text.replace("_", ""));
      if (value > MAX_INTEGER) {
        const message = words("too_large", { found: quoted(token.text), limit: MAX_INTEGER });
        const range = `an integer up to ${MAX_INTEGER}`;
        throw new LayoutSyntaxError(this.text, token.start, token.text.length, message, range);
      }
      if (value < least) throw this.unexpected("a positive integer", token);
      return { type: "number", start: token.start, end: token.end, value };
    }

    /* Consumes a '(' and returns its position. */
    open() {
      const token = this.take("(", "'('");
      this.depth++;
      if (this.depth > MAX_DEPTH) {
        const message = words("too_deep", { limit: MAX_DEPTH });
        throw new LayoutSyntaxError(this.text, token.start, 1, message, `at most ${MAX_DEPTH} levels`);
      }
      return token.start;
    }

    /* Consumes a ')' and returns its end. */
    close(expected) {
      this.depth--;
      return this.take(")", expected).end;
    }

    word(word) {
      if (this.token.kind !== "name" || this.token.text !== word) throw this.unexpected(`'${word}'`);
      this.at++;
    }

    take(kind, expected) {
      const token = this.token;
      if (token.kind !== kind) throw this.unexpected(expected);
      this.at++;
      return token;
    }

    unexpected(expected, token = this.token) {
      const found = token.text ? quoted(token.text) : "the end of the text";
      const length = [...token.text].length;
      return new LayoutSyntaxError(this.text, token.start, length, words("expected", { expected, found }), expected);
    }
  }

  /* The nested array of a shape or stride. */
  const integers = (node) => (node.type === "number" ? node.value : node.items.map(integers));

  class Evaluator {
    constructor(text) {
      this.text = text;
      this.steps = [];
    }

    expression(node) {
      if (node.type === "call") return this.call(node);
      return node.type === "composed" ? this.composed(node) : this.layout(node);
    }

    threadValue(node) {
      const layout = this.layout(node.layout);
      const shape = integers(node.shape);
      if (A.rank(layout) !== 2) throw this.error(node.layout, "tv_rank", { layout });
      if (!A.congruent(shape, [0, 0])) throw this.error(node.shape, "tv_shape", { shape });
      const size = shape[0] * shape[1];
      if (size > MAX_SHOWN) throw this.error(node.shape, "size", { layout: shape, limit: MAX_SHOWN });
      const reach = A.cosize(layout) - 1;
      if (reach >= size) throw this.error(node.layout, "tv_reach", { layout, reach, shape, size });
      const value = { tv: layout, shape };
      this.steps.push({ start: node.start, end: node.end, operation: "tv", operands: [layout, shape], result: value });
      return value;
    }

    composed(node) {
      const { bits, base, shift } = node.swizzle;
      const made = this.located(node.swizzle, () => A.makeSwizzle(bits, base, shift));
      const layout = this.layout(node.layout);
      const value = { ...made, offset: node.offset, layout };
      this.step(node, "swizzle", [made, node.offset, layout], value);
      return value;
    }

    /* A layout written out, or a shape alone, which is compact. */
    layout(node) {
      if (node.type !== "layout" && hasLayouts(node)) throw this.error(node, "tiler_alone");
      if (node.type === "layout") this.checkCongruent(node.shape, node.stride);
      const parts = node.type === "layout" ? [node.shape, node.stride] : [node];
      const value = A.layout(...parts.map(integers));
      this.step(node, "layout", [], value);
      return value;
    }

    /* Throws at the outermost part of the stride that is not nested like its part of the shape. */
    checkCongruent(shape, stride) {
      if (shape.items && stride.items && shape.items.length === stride.items.length) {
        shape.items.forEach((part, i) => this.checkCongruent(part, stride.items[i]));
      } else if (shape.items || stride.items) {
        throw this.error(stride, "congruent", { stride: integers(stride), shape: integers(shape) });
      }
    }

    call(node) {
      const { run, kinds, traced } = FUNCTIONS[node.name];
      const operands = node.arguments.map((part, i) => this.argument(node.name, kinds[i], part));
      if (node.name === "complement" && operands.length === 1) operands.push(A.cosize(operands[0]));
      const trace = (operation, given, result) => this.step(node, operation, given, result);
      const value = this.located(node.arguments, () => (traced ? run(...operands, trace) : run(...operands)));
      if (!traced) trace(node.name, operands, value);
      return value;
    }

    argument(name, kind, node) {
      const given = quoted(this.text.slice(node.start, node.end));
      if (kind === INTEGER) {
        if (node.type !== "number") throw this.error(node, "needs_integer", { function: name, given });
        return node.value;
      }
      if (kind === TILER && (node.type === "number" || node.type === "nest")) return this.tiler(node);
      if (node.type === "nest" && hasLayouts(node)) throw this.error(node, "needs_layout", { function: name, given });
      const value = this.expression(node);
      if (kind !== LAYOUT && A.isComposed(value)) throw this.error(node, "needs_plain", { function: name, given });
      return value;
    }

    tiler(node) {
      if (node.type === "nest") return node.items.map((item) => this.tiler(item));
      return node.type === "number" ? node.value : this.layout(node);
    }

    /* Records a step; throws if its result is too large to show. */
    step(node, operation, operands, result) {
      const inner = A.plain(result);
      if (A.size(inner) > MAX_SHOWN) throw this.error(node, "size", { layout: result, limit: MAX_SHOWN });
      if (A.cosize(inner) + (result.offset ?? 0) > MAX_INTEGER) {
        throw this.error(node, "reach", { layout: result, limit: MAX_INTEGER });
      }
      this.steps.push({ start: node.start, end: node.end, operation, operands, result });
    }

    /* What `run` returns; an AlgebraError becomes one that points at the node, or at the argument among the nodes. */
    located(nodes, run) {
      try {
        return run();
      } catch (error) {
        if (!(error instanceof A.AlgebraError)) throw error;
        const { start, end } = Array.isArray(nodes) ? nodes[error.argument] : nodes;
        throw new LayoutTextError(this.text, start, end - start, error.message);
      }
    }

    error(node, key, values) {
      return new LayoutTextError(this.text, node.start, node.end - node.start, words(key, values));
    }
  }

  /** The tree of a layout text; throws LayoutSyntaxError at the first character outside the grammar. */
  const parse = (text) => new Parser(text).input();

  /**
   * `{value, steps}` of a layout text: a value is a layout, a composed layout or `{tv, shape}`; a step is `{start, end,
   * operation, operands, result}`. Throws LayoutSyntaxError, or LayoutTextError at the argument at fault.
   */
  function evaluate(text) {
    const node = parse(text);
    const evaluator = new Evaluator(text);
    const value = node.type === "tv" ? evaluator.threadValue(node) : evaluator.expression(node);
    return { value, steps: evaluator.steps };
  }

  CF.text = { parse, evaluate, LayoutTextError, LayoutSyntaxError, functions: Object.keys(FUNCTIONS), MAX_TEXT };
})();
