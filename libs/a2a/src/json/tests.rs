//! Cases C3, C5, C7, C11 and C23 as far as parsing goes, and their kin.

use serde_json::json;

use super::*;
use crate::{
    error::Violation,
    v1::{self, part::Content},
    wkt::{Value, value},
};

fn request(parts: &str) -> Result<v1::SendMessageRequest> {
    from_str(&format!(r#"{{"message":{{"messageId":"m","role":"ROLE_USER","parts":{parts}}}}}"#))
}

/// `field: description` of a refusal.
fn refused<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.expect_err("must be refused");
    assert_eq!(error.kind, Kind::InvalidParams, "{error:?}");
    let [Violation { field, description }] = &error.violations[..] else { panic!("{error:?}") };
    let field = if field.is_empty() { "(root)" } else { field };
    format!("{field}: {description}")
}

fn data(json: &str) -> Result<Option<Content>> {
    request(&format!(r#"[{{"data":{json}}}]"#))
        .map(|mut request| request.message.as_mut().unwrap().parts.remove(0).content)
}

#[test]
fn unknown_members_are_ignored_at_every_depth_and_do_not_come_back() {
    let request: v1::SendMessageRequest = from_str(
        r#"{"x_new":1,"message":{"messageId":"m","role":"ROLE_USER","x":{"y":[1e999,{"z":"\ud800 "}]},
            "parts":[{"text":"a","x_new":1}]},"configuration":{"x_new":[[[]]],"historyLength":1}}"#,
    )
    .unwrap();
    insta::assert_snapshot!(
        to_string(&request).unwrap(),
        @r#"{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"a"}]},"configuration":{"historyLength":1}}"#
    );
}

#[test]
fn snake_case_names_are_understood_and_never_written() {
    let request: v1::SendMessageRequest = from_str(
        r#"{"message":{"message_id":"m","context_id":"c","role":"ROLE_USER","parts":[{"text":"","media_type":"a/b"}]}}"#,
    )
    .unwrap();
    insta::assert_snapshot!(
        to_string(&request).unwrap(),
        @r#"{"message":{"messageId":"m","contextId":"c","role":"ROLE_USER","parts":[{"mediaType":"a/b","text":""}]}}"#
    );
}

#[test]
fn null_means_unset_for_every_kind_of_field() {
    let task: v1::Task = from_str(
        r#"{"id":null,"status":{"state":null,"message":null,"timestamp":null},"artifacts":null,"history":
            [{"role":null,"parts":[{"text":null,"raw":null,"url":"u","metadata":null}]}],"metadata":null}"#,
    )
    .unwrap();
    insta::assert_snapshot!(to_string(&task).unwrap(), @r#"{"status":{},"history":[{"parts":[{"url":"u"}]}]}"#);
    let card: v1::AgentCard =
        from_str(r#"{"securitySchemes":null,"capabilities":{"streaming":null},"iconUrl":null,"skills":null}"#).unwrap();
    insta::assert_snapshot!(to_string(&card).unwrap(), @r#"{"capabilities":{}}"#);
    let configuration: v1::SendMessageConfiguration =
        from_str(r#"{"returnImmediately":null,"historyLength":null,"acceptedOutputModes":null}"#).unwrap();
    assert_eq!(configuration, v1::SendMessageConfiguration::default());
}

#[test]
fn null_as_data_is_a_value_and_nulls_inside_are_kept() {
    assert_eq!(data("null").unwrap(), Some(Content::Data(Value::NULL)));
    let request = request(r#"[{"data":{"a":null,"b":[null]},"metadata":{"c":null}}]"#).unwrap();
    insta::assert_snapshot!(
        to_string(&request.message.unwrap().parts[0]).unwrap(),
        @r#"{"metadata":{"c":null},"data":{"a":null,"b":[null]}}"#
    );
}

#[test]
fn a_null_element_is_refused() {
    insta::assert_snapshot!(refused(request(r#"[{"text":"a"},null]"#)), @"message.parts[1]: invalid type: null, expected an object, Part");
    insta::assert_snapshot!(refused(from_str::<v1::Message>(r#"{"extensions":["a",null]}"#)), @"extensions[1]: invalid type: null, expected a string");
}

#[test]
fn an_unknown_enum_value_is_refused_by_name() {
    let role = |role: &str| from_str::<v1::SendMessageRequest>(&format!(r#"{{"message":{{"role":{role}}}}}"#));
    insta::assert_snapshot!(refused(role(r#""ROLE_ROBOT""#)), @"message.role: unknown variant `ROLE_ROBOT`, expected one of `ROLE_UNSPECIFIED`, `ROLE_USER`, `ROLE_AGENT`");
    insta::assert_snapshot!(refused(role("99")), @r#"message.role: invalid value: integer `99`, expected one of: ["ROLE_UNSPECIFIED", "ROLE_USER", "ROLE_AGENT"]"#);
    insta::assert_snapshot!(refused(role("-1")), @r#"message.role: invalid value: integer `-1`, expected one of: ["ROLE_UNSPECIFIED", "ROLE_USER", "ROLE_AGENT"]"#);
    insta::assert_snapshot!(refused(role("1.5")), @r#"message.role: invalid type: floating point `1.5`, expected one of: ["ROLE_UNSPECIFIED", "ROLE_USER", "ROLE_AGENT"]"#);
    insta::assert_snapshot!(refused(from_str::<v1::TaskStatus>(r#"{"state":"working"}"#)), @"state: unknown variant `working`, expected one of `TASK_STATE_UNSPECIFIED`, `TASK_STATE_SUBMITTED`, `TASK_STATE_WORKING`, `TASK_STATE_COMPLETED`, `TASK_STATE_FAILED`, `TASK_STATE_CANCELED`, `TASK_STATE_INPUT_REQUIRED`, `TASK_STATE_REJECTED`, `TASK_STATE_AUTH_REQUIRED`");
    assert_eq!(role("2").unwrap().message.unwrap().role(), v1::Role::Agent);
}

#[test]
fn an_enum_number_without_a_name_is_never_written() {
    let message = v1::Message { role: 99, ..Default::default() };
    assert_eq!(to_vec(&message).unwrap_err().kind, Kind::Internal);
}

#[test]
fn integers_in_data_stay_integers() {
    let text =
        r#"{"big":9007199254740991,"float":1e+300,"frac":0.1,"list":[0,-7,1.5],"min":-9007199254740991,"one":1}"#;
    let Some(Content::Data(value)) = data(text).unwrap() else { panic!() };
    assert_eq!(to_string(&value).unwrap(), text);
    let Some(Content::Data(value)) =
        data(r"[1.0, 1e1, -0.0, 6.022e23, 9007199254740992.0, -1e300, -9223372036854775808.0]").unwrap()
    else {
        panic!()
    };
    assert_eq!(to_string(&value).unwrap(), "[1,10,0,6.022e+23,9007199254740992.0,-1e+300,-9.223372036854776e+18]");
    assert_eq!(from_str::<Value>(&to_string(&value).unwrap()).unwrap(), value);
}

#[test]
fn an_integer_that_would_change_is_refused_by_name() {
    insta::assert_snapshot!(refused(data(r#"{"one":1,"over":9007199254740993}"#)), @"message.parts[0].data.over: the integer 9007199254740993 is beyond ±(2^53 − 1) and would change; send it as a string");
    insta::assert_snapshot!(refused(data(r#"[0,[-9007199254740992]]"#)), @"message.parts[0].data[1][0]: the integer -9007199254740992 is beyond ±(2^53 − 1) and would change; send it as a string");
    insta::assert_snapshot!(refused(data("18446744073709551616")), @"message.parts[0].data: the integer 18446744073709552000 is beyond ±(2^53 − 1) and would change; send it as a string");
    insta::assert_snapshot!(refused(from_str::<v1::Message>(r#"{"metadata":{"a":{"b":-99999999999999999999}}}"#)), @"metadata.a.b: the integer -100000000000000000000 is beyond ±(2^53 − 1) and would change; send it as a string");
    insta::assert_snapshot!(refused(data("[1e400]")), @"message.parts[0].data[0]: the number is too large");
    // The same digits in a string, and as a float, are no integer.
    data(r#"["18446744073709551616 \" 18446744073709551616", 1.8446744073709552e19]"#).unwrap();
}

#[test]
fn nan_and_infinity_are_not_written() {
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(to_vec(&Value::from(vec![number.into()])).unwrap_err().kind, Kind::Internal);
        assert_eq!(to_value(&Value::from(number)).unwrap_err().kind, Kind::Internal);
    }
    assert_eq!(data("NaN").unwrap_err().kind, Kind::Parse);
}

#[test]
fn two_members_of_a_oneof_or_a_repeated_field_are_refused() {
    insta::assert_snapshot!(refused(request(r#"[{"text":"a"},{"text":"a","url":"b"}]"#)), @"message.parts[1]: `url` is set twice, or together with another member of its oneof");
    insta::assert_snapshot!(refused(request(r#"[{"data":null,"text":"a"}]"#)), @"message.parts[0]: `text` is set twice, or together with another member of its oneof");
    insta::assert_snapshot!(refused(from_str::<v1::Message>(r#"{"messageId":"a","message_id":"b"}"#)), @"(root): `messageId` is set twice, or together with another member of its oneof");
}

#[test]
fn history_length_is_an_int32() {
    let get = |length: &str| from_str::<v1::GetTaskRequest>(&format!(r#"{{"id":"t","historyLength":{length}}}"#));
    for (text, length) in [("0", 0), ("-1", -1), ("\"10\"", 10), ("1e1", 10), ("2.0", 2), ("2147483647", i32::MAX)] {
        assert_eq!(get(text).unwrap().history_length, Some(length), "{text}");
    }
    assert_eq!(get("null").unwrap().history_length, None);
    for wrong in ["2147483648", "\"abc\"", "\"\"", "1.5", "true", "[]", "{}", "1e99", "\"1.0\"", "18446744073709551616"]
    {
        assert_eq!(
            refused(get(wrong)),
            "historyLength: expected a 32-bit integer, as a number or a decimal string",
            "{wrong}"
        );
    }
}

#[test]
fn a_wrong_type_is_named() {
    insta::assert_snapshot!(refused(request(r#""hi""#)), @r#"message.parts: invalid type: string "hi", expected a sequence"#);
    insta::assert_snapshot!(refused(request(r#"[{"text":5}]"#)), @"message.parts[0].text: invalid type: integer `5`, expected a string");
    insta::assert_snapshot!(refused(request(r#"[{"text":"a","media_type":{}}]"#)), @"message.parts[0].mediaType: invalid type: map, expected a string");
    insta::assert_snapshot!(refused(from_str::<v1::SendMessageRequest>("[]")), @"(root): invalid type: sequence, expected an object, SendMessageRequest");
    insta::assert_snapshot!(refused(from_value::<v1::SendMessageRequest>(json!(7))), @"(root): invalid type: integer `7`, expected an object, SendMessageRequest");
    insta::assert_snapshot!(refused(from_value::<v1::SendMessageRequest>(json!({"message": {"parts": [{}, 7]}}))), @"message.parts[1]: invalid type: integer `7`, expected an object, Part");
    insta::assert_snapshot!(refused(from_str::<v1::Message>(r#"{"metadata":[]}"#)), @"metadata: invalid type: sequence, expected a map");
    let long = format!(r#"{{"metadata":{{"{0}":{{"{0}":1e999}}}},"role":"{0}"}}"#, "k".repeat(5000));
    assert!(refused(from_str::<v1::Message>(&long)).len() < 600);
}

#[test]
fn base64_is_read_in_every_form_and_written_in_one() {
    for text in ["+/+/aQ==", "+/+/aQ", "-_-_aQ==", "-_-_aQ"] {
        let request = request(&format!(r#"[{{"raw":"{text}"}}]"#)).unwrap();
        assert_eq!(to_string(&request.message.unwrap().parts[0]).unwrap(), r#"{"raw":"+/+/aQ=="}"#);
    }
    insta::assert_snapshot!(refused(request(r#"[{"raw":"-_-/aQ"}]"#)), @"message.parts[0].raw: not base64: Invalid symbol 47, offset 3.");
    insta::assert_snapshot!(refused(request(r#"[{"raw":"a!"}]"#)), @"message.parts[0].raw: not base64: Invalid symbol 33, offset 1.");
    insta::assert_snapshot!(refused(request(r#"[{"raw":"a"}]"#)), @"message.parts[0].raw: not base64: Invalid input length: 1");
}

#[test]
fn timestamps_are_read_with_any_offset_and_written_in_z() {
    let stamp = |text: &str| from_str::<v1::TaskStatus>(&format!(r#"{{"timestamp":"{text}"}}"#));
    for (text, utc) in [
        ("2026-03-12T10:00:00Z", "2026-03-12T10:00:00Z"),
        ("2026-03-12T10:00:00.5+02:00", "2026-03-12T08:00:00.500Z"),
        ("2026-03-12T00:00:00.000001-23:59", "2026-03-12T23:59:00.000001Z"),
        ("1969-12-31T23:59:59.999999999Z", "1969-12-31T23:59:59.999999999Z"),
        ("2026-03-12t10:00:00.123456z", "2026-03-12T10:00:00.123456Z"),
        ("2024-02-29T23:59:59+00:00", "2024-02-29T23:59:59Z"),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
        ("9999-12-31T23:59:59.999999999Z", "9999-12-31T23:59:59.999999999Z"),
    ] {
        assert_eq!(to_string(&stamp(text).unwrap()).unwrap(), format!(r#"{{"timestamp":"{utc}"}}"#));
    }
    for wrong in [
        "",
        "yesterday",
        "2026-03-12",
        "2026-03-12T10:00:00",
        "2026-03-12T10:00:00 02:00",
        "2026-02-30T10:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "2026-03-12T10:00:00.1234567890Z",
        "2026-03-12T10:00:00+00:00[UTC]",
        "2026-03-12T10Z",
        "2026-03-12T10:00Z",
        "20260312T100000Z",
        "2026-03-12 10:00:00Z",
        "+002026-03-12T10:00:00Z",
        "2026-03-12T10:00:00,5Z",
        "2026-03-12T10:00:00+02",
        "2026-03-12T24:00:00Z",
        "2026-03-12T10:00:00.Z",
        "2026-03-12T10:00:00.5",
        "2026-03-12T10:00:00+24:00",
        "2026-03-12T10:00:60Z",
        "2026-03-12T10:00:00Zé",
        "2026-03-12T10:00:0é",
        "-026-03-12T10:00:00Z",
    ] {
        assert_eq!(
            refused(stamp(wrong)),
            "timestamp: not an RFC 3339 timestamp with Z or an offset, in the years 1 to 9999",
            "{wrong}"
        );
    }
}

#[test]
fn nesting_beyond_the_limit_is_refused_and_32_levels_pass_through_protobuf() {
    use prost::Message as _;
    let nest = |depth: usize| data(&format!("{}{}", r#"{"a":"#.repeat(depth - 1) + "{", "}".repeat(depth)));
    assert!(refused(nest(33)).ends_with(": nested deeper than 32 levels"));
    assert!(refused(nest(120)).starts_with("message.parts[0].data.a.a.a"));
    assert!(refused(data(&format!("{}{}", "[".repeat(5000), "]".repeat(5000)))).ends_with("deeper than 32 levels"));
    let part = v1::Part { content: nest(32).unwrap(), ..Default::default() };
    let history = vec![v1::Message { parts: vec![part], ..Default::default() }];
    let task = v1::Task { history, ..Default::default() };
    let event = v1::StreamResponse { payload: Some(v1::stream_response::Payload::Task(task)) };
    assert_eq!(v1::StreamResponse::decode(&event.encode_to_vec()[..]).unwrap(), event);
    // Deep nesting in what is ignored costs nothing.
    from_str::<v1::Message>(&format!(r#"{{"x":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000))).unwrap();
}

#[test]
fn what_is_not_json_is_a_parse_error_even_when_the_fields_are_wrong_too() {
    for text in [
        "",
        "{",
        r#"{"message":{"role":"ROLE_ROBOT"}"#,
        "{} {}",
        "nul",
        r#"{"tenant":"\ud800"}"#,
        "{'a':1}",
        "{\"a\":1,}",
    ] {
        assert_eq!(from_str::<v1::SendMessageRequest>(text).map(|_| ()).unwrap_err().kind, Kind::Parse, "{text}");
    }
    assert_eq!(from_slice::<v1::GetTaskRequest>(b"{\"id\":\"\xff\"}").unwrap_err().kind, Kind::Parse);
    insta::assert_snapshot!(from_str::<v1::GetTaskRequest>("{\"id\":").unwrap_err(), @"Invalid JSON payload: EOF while parsing a value at line 1 column 6");
    assert_eq!(from_slice::<v1::GetTaskRequest>(br#"{"id":"t"}"#).unwrap().id, "t");
}

#[test]
fn an_empty_list_response_is_written_in_full() {
    insta::assert_snapshot!(to_string(&v1::ListTasksResponse::default()).unwrap(), @r#"{"tasks":[],"nextPageToken":"","pageSize":0,"totalSize":0}"#);
    insta::assert_snapshot!(to_string(&v1::ListTaskPushNotificationConfigsResponse::default()).unwrap(), @"{}");
}

#[test]
fn struct_keys_keep_their_spelling_and_are_sorted() {
    let message: v1::Message = from_str(r#"{"metadata":{"snake_key":1,"B":{"y_y":[],"x":{}},"":"","ü\n":2}}"#).unwrap();
    insta::assert_snapshot!(to_string(&message).unwrap(), @r#"{"metadata":{"":"","B":{"x":{},"y_y":[]},"snake_key":1,"ü\n":2}}"#);
}

#[test]
fn a_value_without_a_kind_is_written_as_null() {
    assert_eq!(to_string(&Value { kind: None }).unwrap(), "null");
    assert_eq!(to_string(&Value::from(value::Kind::NullValue(7))).unwrap(), "null");
}
