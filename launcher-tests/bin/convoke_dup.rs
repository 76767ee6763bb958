//! The launcher, with its fault points.

fn main() -> std::process::ExitCode {
    convoke::main()
}
