//! The launcher, which fails where a test orders it to.

fn main() -> std::process::ExitCode {
    convoke::main()
}
